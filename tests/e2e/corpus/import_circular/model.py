from data import Data
