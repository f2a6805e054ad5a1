"""Reports of commands: screens and pages of plans, comparisons, profiles and traces."""
