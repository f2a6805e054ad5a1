"""Hardware presets that ship with moeplan: profiles of GPUs that one does not have, fitted to published tables."""

from .preset import PRESETS, Preset, load_preset

__all__ = ["PRESETS", "Preset", "load_preset"]
