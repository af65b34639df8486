"""SGLang: HTTP client, command line of the server, plugin and weight receiver that run inside the server."""
