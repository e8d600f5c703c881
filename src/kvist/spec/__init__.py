"""What a model must remember: layers, formats, and the readers that find them in published files."""
