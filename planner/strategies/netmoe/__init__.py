"""NetMoE: every layer's combine delivers each sample to the device where its next experts are."""
