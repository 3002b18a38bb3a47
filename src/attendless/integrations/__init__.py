"""Ways into other people's models: each finds the attention layers of a model and exchanges them."""
