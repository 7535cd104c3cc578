"""specfw inside other libraries and services."""
