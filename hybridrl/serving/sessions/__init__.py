"""Sessions: the conversations of one agent, kept as the exact tokens that the policy read and sampled.

    session = store.find("my-session")
    plan = session.plan(messages, tools, tokenizer)     the next prompt: recorded tokens, then only what is new
    session.record(plan, ...)                           what the engine sampled for it
    session_rows(session.turns)                         rows to train on

The endpoint calls this for every chat request of a session. `message_keys` compares messages, `matching` finds the
recorded turn that a request continues, `prompts` renders what is new, `rows` turns a session into training rows. These
are pure; `session` and `store` keep the state. Not here: HTTP (`serving/openai`), and agents
(`serving/agent_loop/programs`).
"""
