"""ExFlow placements: held-out quality on real routing, shares of the best known, growth with L, E and D.

Annealing's budgets are work: so many seconds of the time limit on a quiet machine, whatever else this one does.
"""

from . import growth, real, reference

STUDIES = (*real.STUDIES, *reference.STUDIES, *growth.STUDIES)
