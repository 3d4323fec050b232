"""Numbers of bytes for people."""


def size(nbytes: float) -> str:
    """Format bytes: 1.2 GB, 98.3 kB."""
    if abs(nbytes) < 1000:
        return f"{nbytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):  # noqa: B007
        nbytes /= 1000
        if abs(nbytes) < 1000:
            break
    return f"{nbytes:,.1f} {unit}"
