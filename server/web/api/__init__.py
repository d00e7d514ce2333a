"""The native API: JSON over HTTP for clients under `/v1` and for operators' programs under `/admin/api`."""
