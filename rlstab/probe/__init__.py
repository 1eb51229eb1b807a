"""Probes: experiments that provoke one instability each, with a dial, and the score of a method in them."""
