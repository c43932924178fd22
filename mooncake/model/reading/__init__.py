"""The weights of a checkpoint as the models need them: ``weights`` reads them, from any format."""
