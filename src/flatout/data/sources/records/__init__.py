"""Files of records: TFRecord, Criteo, LibSVM, and folders of rows."""
