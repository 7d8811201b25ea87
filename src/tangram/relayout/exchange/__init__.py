"""Copy plans carried out between ranks: what they say to each other, and packed bytes in rounds of bounded memory."""
