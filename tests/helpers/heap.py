"""The C library's heap in programs whose memory is measured."""
