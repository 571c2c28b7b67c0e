"""The HTTP APIs: one module per API, with its request and answer structs. `culet.serve.app` lists them."""
