"""What each op means, in plain PyTorch: any device, any floating dtype, fp64-capable. The CPU runs the rows family from here."""
