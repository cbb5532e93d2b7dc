"""Tests of the server, by real clients over real sockets."""
