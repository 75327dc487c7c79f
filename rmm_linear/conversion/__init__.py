"""Convert a model's linear layers to sketched ones, report the conversion, save and load its state."""
