"""OpenAI's Responses, without stored state: another form of the requests and answers of a chat."""
