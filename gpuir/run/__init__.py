"""The whole way from a model to an answer: on one device, over ranks, or over a design space."""
