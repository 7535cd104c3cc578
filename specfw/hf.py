"""specfw as a drop-in for `generate` of transformers.

`model.generate(..., custom_generate=specfw.hf.custom_generate(drafter="ngram"))`, or
`specfw.hf.generate(model, ...)`, which takes streamers and stop strings too.
"""

from __future__ import annotations

from specfw.integrations.transformers import CustomGenerate, custom_generate, generate

__all__ = ["CustomGenerate", "custom_generate", "generate"]
