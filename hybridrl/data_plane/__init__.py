"""What `hybridrl.protocol` is made of: columns, their bytes, their sharing between processes, references to them
elsewhere.
"""
