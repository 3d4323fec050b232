"""Results that appear whole or not at all: copying, locks, whose files a folder holds, and the
folder's final name.
"""
