"""The HTTP APIs. Each has its own module, with its request and answer structs. `culet.serve.app` lists them."""
