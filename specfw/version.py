"""The version of specfw, in the one place that packaging and plugin checks both read."""

__all__ = ["__version__"]

__version__ = "0.1.0"
