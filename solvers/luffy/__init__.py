"""LUFFY: samples move to where attention and exchanges together take least (papers: LUFFY)."""

from .attention import Attention, Law, deal, law_of
from .rehoming import METHODS, compile_rehoming, first_homes, rehome

__all__ = ["METHODS", "Attention", "Law", "compile_rehoming", "deal", "first_homes", "law_of", "rehome"]
