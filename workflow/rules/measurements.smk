# Needs the model and the token rows. Makes costs.* and padding.*: what the flags of a capture cost, what pads do.
# Guarantees: nothing is measured while another job of the run is at work; no figure without its spread.
