"""What acts outside the loss, before it is computed."""
