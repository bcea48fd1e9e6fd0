"""Other protocols for the same answers: each file translates bodies to chats or completions, and answers back."""
