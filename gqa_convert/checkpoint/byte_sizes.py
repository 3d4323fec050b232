"""Numbers of bytes for people."""


def size(nbytes: float) -> str:
    """Format bytes: 1.2 GB, 98.3 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    raise AssertionError
