"""The engine: packed steps over all requests, and the KV memory they share."""
