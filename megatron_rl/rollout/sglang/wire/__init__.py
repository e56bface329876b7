"""SGLang's HTTP API: request bodies and validated replies."""
