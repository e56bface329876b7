"""SGLang's HTTP API: what a request says, what an answer may say."""
