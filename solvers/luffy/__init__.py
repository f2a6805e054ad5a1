"""LUFFY: samples move to where attention and exchanges together take least (papers: LUFFY)."""

from .attention import Attention, Law, law_of
from .rehoming import METHODS, compile_rehoming, rehome

__all__ = ["METHODS", "Attention", "Law", "compile_rehoming", "law_of", "rehome"]
