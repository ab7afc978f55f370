"""Page trailer: what makes a page buffer self-describing and checked."""


class PageFormat:
    """Seals and checks page buffers of one namespace."""
