"""What merging the decoder of a real speech model loses: Whisper base, on sentences that espeak-ng speaks."""
