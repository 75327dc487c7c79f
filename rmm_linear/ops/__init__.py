"""PyTorch operators of the sketches, with fakes and FLOP formulas, dispatched by device."""
