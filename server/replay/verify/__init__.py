"""The offline proof: raw bytes parsed again, requests built again, both compared with what is stored."""
