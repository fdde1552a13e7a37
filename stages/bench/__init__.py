"""Stage 5, head -> report: speed, acceptance and losslessness of a draft head, against plain decoding."""
