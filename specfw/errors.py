"""Every error that specfw raises on purpose.

Each message says who complains, what was expected, what came and what to do, in one sentence.
The command line prints these without a traceback and exits with code 2.
"""

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContractError",
    "PluginError",
    "SpecfwError",
    "UnknownComponentError",
    "UnsupportedModelError",
]


class SpecfwError(Exception):
    """The base of all errors that are meant for the user."""


class ConfigError(SpecfwError, ValueError):
    """A setting, a combination of settings or a request is wrong."""


class UnknownComponentError(ConfigError):
    """A name was given that no loaded plugin offers."""


class PluginError(SpecfwError):
    """A plugin could not be found, imported, checked or registered."""


class ContractError(SpecfwError):
    """A component broke its contract (a wrong shape, an impossible node, a non-finite law)."""


class UnsupportedModelError(SpecfwError):
    """The packed forward cannot run this model exactly."""


class CapacityError(SpecfwError):
    """A request does not fit into the context or into the KV memory, even alone."""
