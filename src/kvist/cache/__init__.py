"""Who owns which block: pure Python and NumPy, no tensors."""
