"""The APIs that the endpoint serves, each a translation onto one chat path.

    completions      /v1/completions and /v1/chat/completions of OpenAI
    responses        /v1/responses of OpenAI
    messages         /v1/messages and /v1/messages/count_tokens of Anthropic

An API turns a request into the body of a chat request, and an answer into its own body or its own events. Everything
between, such as sessions, tools, limits and sampling, is the same for all of them. `server` calls them.
"""
