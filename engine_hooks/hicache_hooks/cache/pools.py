"""L1 device pool and L2 host pool: the memory of KV pages."""


class DevicePool:
    """Paged KV of every layer on the device."""


class HostPool:
    """Host memory of KV pages, one contiguous allocation."""
