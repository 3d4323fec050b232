"""What a model's predictions of text are worth: losses, distances from another model, tasks."""
