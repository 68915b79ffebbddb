"""Fragments, codecs, trees and rounds: how peers average parameters."""
