"""The client process as a server: OpenAI's interface to a served model, a chat page, chat templates. No torch."""
