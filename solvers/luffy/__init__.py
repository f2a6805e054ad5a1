"""LUFFY: samples move to where attention and exchanges together take least (papers: LUFFY)."""

from .attention import Attention, Law, deal, law_of
from .rehoming import METHODS, compile_rehoming, rehome

__all__ = ["METHODS", "Attention", "Law", "compile_rehoming", "deal", "law_of", "rehome"]
