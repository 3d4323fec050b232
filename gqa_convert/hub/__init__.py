"""The model card of a converted checkpoint, and its upload to the Hugging Face Hub."""
