"""The HTTP front door: an API that clients of OpenAI speak. Knows no worker and no kernel."""
