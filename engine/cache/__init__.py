"""Where K and V of a sequence live."""

from engine.cache.basic import BasicKvCache

__all__ = ["BasicKvCache"]
