"""Comparison of versions by their release, e.g. 2.13 of 2.13.0+cpu."""


def release(version: str) -> tuple[int, ...]:
    """Return major and minor of a version; patch versions, builds and pre-releases of a release are alike here."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
