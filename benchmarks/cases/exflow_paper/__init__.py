"""Figures 7, 8 and 13 and Table III of ExFlow (arXiv 2401.08383): what the text states beside what comes out here.

The paper's models, data and cluster are not at hand. What it tells of them sets the sizes: top-1, nodes of 4 GPUs,
hidden 1,024; 12 MoE layers as in Figure 2 (Table II: 24 layers). Of plots, only numbers that the text states are taken.
"""

from . import shares, shift, tokens

STUDIES = (*shares.STUDIES, *tokens.STUDIES, *shift.STUDIES)
