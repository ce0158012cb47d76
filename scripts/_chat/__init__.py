"""Helpers of scripts/chat.py.

chat_source.py    which checkpoint, export or adapter a path selects; imports no torch
chat_model.py     the model and tokenizer of a source, on one device
conversation.py   turns, system message and streamed answers
answer_screen.py  output on a terminal: prompt, wrapped words, notes
"""
